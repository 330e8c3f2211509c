"""The layers that compute the logits, in the classifier of any model."""

from torch import nn

from models.parts import classifier_names


def output_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Return {path: layer} of the linear layers that compute the logits.

    It is the classifier itself, or the last linear layer in it if a norm or a hidden layer comes before. Some models
    average the outputs of two such layers: a distilled DeiT, a CrossViT, a RepViT.
    """
    layers = {}
    for head in classifier_names(model):
        inside = model.get_submodule(head).named_modules(prefix=head)
        linear = {path: each for path, each in inside if isinstance(each, nn.Linear | nn.Conv2d)}
        counts = {path: each.weight.shape[0] for path, each in linear.items()}
        layers |= {path: each for path, each in linear.items() if counts[path] == list(counts.values())[-1]}
    return layers


def set_to_zero(layer: nn.Module) -> None:
    for parameter in layer.parameters():
        nn.init.zeros_(parameter)
