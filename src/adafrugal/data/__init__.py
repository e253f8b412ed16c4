"""Data: text in, a tokenizer, packed windows, and a cursor that resumes exactly."""
