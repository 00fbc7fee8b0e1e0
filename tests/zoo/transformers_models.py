"""The transformers models of the zoo: small configurations of their own."""

from tests.zoo.transformers_senses import SENSES
from tests.zoo.transformers_text import TEXTS

TRANSFORMERS = [*TEXTS, *SENSES]
