"""Images at their own aspect ratio (DATA.TOKENS), as sequences of patches for timm's NaFlexVit.

A batch stays one uint8 tensor, so that loaders, pinned memory, prefetching and memory recovery need no change:
[B, N + 1, P * P * C] has N patches per image, padded with zeros, and a last row whose first bytes are the size of the
image's grid of patches (grids.py). PatchNormalize (preparation.py) turns it into the dict that NaFlexVit takes.
"""
