"""How a decoder is computed: packed inputs, attention, fused layers, log-probs. Depends on torch only."""
