"""What is known before a run starts: the sizes of a model, and the bytes that training it takes."""
