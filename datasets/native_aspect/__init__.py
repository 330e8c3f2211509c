"""Images at their own aspect ratio, as sequences of patches for timm's NaFlexVit.

A batch is one uint8 tensor [B, N + 1, P * P * C], so that loaders, pinned memory, prefetching and memory recovery work
as for squares. Each image has N patches, padded with zeros, and a last row whose first bytes are the size of its grid
(grids.py). PatchNormalize (batches.py) turns a batch into the dict that NaFlexVit takes.
"""
