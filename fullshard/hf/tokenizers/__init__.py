"""Tokenizers: loaded, trained, and compared with the one that stored weights were trained with."""
