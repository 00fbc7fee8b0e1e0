"""The structure of an attention mask, read from the graph of the program that computes it.

User code builds masks as arrays of the size of the scores. This package walks back the graph behind
such an array to the short arrays that it was broadcast from. Attention gets the structure (causal,
window, segments, valid keys) and a function that computes any tile of the rest. Nothing then reads
the array, so it is not computed.
"""
