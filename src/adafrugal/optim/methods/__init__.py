"""Published methods, each a preset of the engine: FRUGAL, AdaFRUGAL, GaLore, BAdam, SignSGD."""

from adafrugal.core.catalog import Catalog
from adafrugal.optim.methods.adafrugal import AdaFRUGAL
from adafrugal.optim.methods.badam import BAdam
from adafrugal.optim.methods.frugal import FRUGAL
from adafrugal.optim.methods.galore import GaLore
from adafrugal.optim.methods.signsgd import SignSGD
from adafrugal.optim.split import SplitOptimizer

METHODS: Catalog[SplitOptimizer] = Catalog("optimizer")
METHODS.add("adafrugal", AdaFRUGAL)
METHODS.add("frugal", FRUGAL)
METHODS.add("galore", GaLore)
METHODS.add("badam", BAdam)
METHODS.add("signsgd", SignSGD)

__all__ = ["FRUGAL", "METHODS", "AdaFRUGAL", "BAdam", "GaLore", "SignSGD"]
