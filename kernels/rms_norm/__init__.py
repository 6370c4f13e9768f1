"""Root-mean-square normalisation, alone and fused with the residual addition before it."""
