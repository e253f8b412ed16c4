"""Train a language model inside the memory, data and compute that you have."""

from adafrugal.optim.groups import param_groups
from adafrugal.optim.methods import FRUGAL, AdaFRUGAL, BAdam, GaLore, SignSGD

__version__ = "0.1.0"

__all__ = ["FRUGAL", "AdaFRUGAL", "BAdam", "GaLore", "SignSGD", "__version__", "param_groups"]
