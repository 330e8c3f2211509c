"""Turns batches of patches into the inputs of NaFlexVit, on the device of the model."""

import torch
from torch import Tensor

from configs.schema import Config, Data
from datasets.transforms.crop import Normalize
from datasets.transforms.mixed import Mixed
from datasets.transforms.preparation import copied
from datasets.types import Batch
from extras.native_aspect.erasing import PatchBoxes, PatchErasing
from extras.native_aspect.grids import GRID_BYTES, grids_of, patch_of, pictures_of
from extras.native_aspect.mixing import PatchMixing
from extras.native_aspect.models import patch_size_of

Sequences = dict[str, Tensor]  # the dict that NaFlexVit takes


class PatchNormalize(Normalize):
    """Normalizes patches, uint8 [B, N + 1, P * P * C], and returns the dict that NaFlexVit takes."""

    def __init__(self, data: Data, dtype: torch.dtype = torch.float32):
        super().__init__(data, dtype)
        self.scale, self.shift = self.scale.flatten(), self.shift.flatten()  # channels are last in a patch

    def forward(self, images: Tensor, dtype: torch.dtype | None = None) -> Sequences:
        """Return {"patches": [B, N, P * P * C], "patch_coord": [B, N, 2], "patch_valid": [B, N]}.

        Images without a grid, which pad a batch, get a single patch: attention without any valid patch would be NaN.
        """
        pixels = images[:, :-1].unflatten(2, (-1, len(self.scale)))  # [B, N, P * P, C]
        patches = torch.empty(pixels.shape, dtype=dtype or self.dtype, device=images.device)
        torch.addcmul(self.shift, pixels, self.scale, out=patches)
        head = images[:, -1, :GRID_BYTES].to(torch.int64)
        rows, columns = (head[:, 0::2] + 256 * head[:, 1::2]).clamp_min(1)[:, None].unbind(2)  # [B, 1] each
        numbers = torch.arange(pixels.shape[1], device=images.device)
        valid = numbers < rows * columns  # [B, N]
        coord = torch.stack((numbers // columns, numbers % columns), 2)
        return {"patches": patches.flatten(2), "patch_coord": coord * valid[..., None], "patch_valid": valid}

    def pixels(self, images: Sequences) -> list[Tensor]:
        """Return the normalized images as uint8 [C, H, W] again, each in its own size."""
        values = images["patches"].unflatten(2, (-1, len(self.scale)))
        patches = ((values - self.shift) / self.scale).round().clamp(0, 255).to(torch.uint8).flatten(2)
        grids = (images["patch_coord"].amax(1) + 1).tolist()
        return [torch.from_numpy(each).permute(2, 0, 1) for each in pictures_of(patches, grids)]

    def mirrored(self, images: Sequences) -> Sequences:
        """Return the images mirrored from left to right."""
        patches, coord = images["patches"], images["patch_coord"]
        patch, channels = patch_of(patches.shape[2])
        columns = coord[..., 1].amax(1, keepdim=True) + 1
        # The index of the patch at the mirrored position. Patches of padding keep their index.
        numbers = torch.arange(coord.shape[1], device=coord.device)
        sources = torch.where(images["patch_valid"], coord[..., 0] * columns + columns - 1 - coord[..., 1], numbers)
        flipped = patches.unflatten(2, (patch, patch, channels)).flip(3).flatten(2)
        return images | {"patches": flipped.gather(1, sources[..., None].expand_as(flipped))}


class SequencePreparation:
    """Turns a loader's batch into the inputs of the model and the loss. The reader has already mixed the images."""

    def __init__(self, config: Config, normalize: PatchNormalize):
        self.normalize, self.device = normalize, normalize.scale.device
        patch = patch_size_of(config)
        self.boxes, self.mixing, self.erase = PatchBoxes(config), PatchMixing(config, patch), None
        if config.TRAIN.RANDOM_ERASE_PROB:
            self.erase = PatchErasing(config, self.device, patch * patch * config.DATA.IMAGE_CHANNELS)

    def __call__(self, batch: Batch, dtype: torch.dtype | None = None) -> tuple[Sequences, Tensor | Mixed]:
        """Return the dict for the model and the targets [B], or Mixed. Patches have the type `dtype`."""
        targets = batch.targets.to(self.device, non_blocking=True)
        images = self.normalize(batch.images.to(self.device, non_blocking=True), dtype)
        is_mixed = batch.piece is not None and self.mixing.is_on(batch.piece)
        if batch.piece is None or not (self.erase or is_mixed):  # a batch that was made by hand has no piece
            return images, targets
        if batch.boxes is None:
            batch = self._drawn(batch)
        if self.erase:
            rows = self.erase.rows(batch.boxes, images["patches"].shape[1])
            self.erase(images["patches"], copied(rows, self.device))
        if not is_mixed:
            return images, targets
        partners = (torch.arange(len(targets), device=self.device) ^ 1).clamp_max(len(targets) - 1)
        return images, Mixed(targets, targets[partners], copied(batch.shares, self.device))

    def _drawn(self, batch: Batch) -> Batch:
        """Return a saved or generated batch with its boxes and shares. The host waits for the device."""
        grids = grids_of(batch.images[:, -1:].cpu())
        shares = self.mixing.shares(self.mixing.draw(batch.piece, grids), grids)
        return batch._replace(boxes=self.boxes.draw(batch.piece, grids), shares=shares)
