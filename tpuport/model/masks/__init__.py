"""What a mask of attention is made of, read from the graph of the program that computes it.

User code builds masks as arrays of the size of the scores. Here the graph behind such an array is
walked back to the short arrays that it was broadcast from. Attention gets the structure (causal,
window, segments, valid keys) and a function that computes any tile of the rest. Nothing reads the
array then, and it is not computed.
"""
