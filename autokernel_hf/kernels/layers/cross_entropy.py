"""A stateless cross entropy loss for `kernelize` and for direct use."""

import torch
from torch import nn

from ._ops import cross_entropy


class CrossEntropyLoss(nn.Module):
    """torch.nn.CrossEntropyLoss without class weights.

    The loss is computed in float32 and has the logits' dtype. Targets that are probabilities are no business of the
    kernel: torch computes their loss.
    """

    can_torch_compile = True
    has_backward = False
    ignore_index: int
    label_smoothing: float
    reduction: str

    def forward(self, input: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        if target.is_floating_point():
            return nn.functional.cross_entropy(
                input, target, reduction=self.reduction, label_smoothing=self.label_smoothing
            )
        logits = input.movedim(1, -1).flatten(0, -2) if input.dim() > 1 else input[None]
        loss = cross_entropy(
            logits, target.reshape(-1), self.ignore_index, self.label_smoothing, self.reduction
        ).to(input.dtype)
        return loss.view(target.shape) if self.reduction == "none" else loss
