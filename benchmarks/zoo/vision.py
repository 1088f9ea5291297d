"""Networks for images: residual, inverted residual, U-Net, and three kinds of transformers and their relatives."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zoo import Setup, architecture, supervised

EXAMPLES, CLASSES = 32, 10


def classifier(
    model: nn.Module, optimizer: torch.optim.Optimizer, answers: str, *, size: int = 16, clip: float | None = None
) -> Setup:
    """A network that tells ten classes of random images apart."""
    images, labels = torch.randn(EXAMPLES, 3, size, size), torch.randint(CLASSES, (EXAMPLES,))
    return Setup(
        model,
        optimizer,
        EXAMPLES,
        supervised(model, optimizer, lambda ids: F.cross_entropy(model(images[ids]), labels[ids]), clip=clip),
        torch.randn(1, 3, size, size),
        lambda output: output[:, 3],
        answers,
        lambda ids: {"example": ids, "label": labels[ids]},
    )


class BasicBlock(nn.Module):
    def __init__(self, inside: int, outside: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inside, outside, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outside)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(outside, outside, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outside)
        self.downsample = None
        if stride != 1 or inside != outside:
            self.downsample = nn.Sequential(nn.Conv2d(inside, outside, 1, stride, bias=False), nn.BatchNorm2d(outside))

    def forward(self, x: Tensor) -> Tensor:
        identity = x if self.downsample is None else self.downsample(x)
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += identity
        return self.relu(out)


class ResNet18(nn.Module):
    """That of torchvision, an eighth as wide."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 7, 2, 3, bias=False)
        self.bn1, self.relu, self.maxpool = nn.BatchNorm2d(width), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)
        stages, inside = [], width
        for number in range(4):
            outside = width * 2**number
            stride = 1 if number == 0 else 2
            stages.append(nn.Sequential(BasicBlock(inside, outside, stride), BasicBlock(outside, outside)))
            inside = outside
        self.layer1, self.layer2, self.layer3, self.layer4 = stages
        self.avgpool, self.fc = nn.AdaptiveAvgPool2d(1), nn.Linear(inside, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(torch.flatten(self.avgpool(x), 1))


@architecture("ResNet-18")
def resnet18() -> Setup:
    model = ResNet18()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4, nesterov=True)
    return classifier(model, optimizer, "fc", size=32)


class SqueezeExcite(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc1, self.fc2 = nn.Conv2d(channels, channels // 4, 1), nn.Conv2d(channels // 4, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x * F.hardsigmoid(self.fc2(F.relu(self.fc1(self.avgpool(x)))))


class InvertedResidual(nn.Module):
    def __init__(self, channels: int, wide: int, kernel: int) -> None:
        super().__init__()
        self.block = nn.Sequential(
            nn.Sequential(nn.Conv2d(channels, wide, 1, bias=False), nn.BatchNorm2d(wide, eps=1e-3), nn.Hardswish()),
            nn.Sequential(
                nn.Conv2d(wide, wide, kernel, padding=kernel // 2, groups=wide, bias=False),
                nn.BatchNorm2d(wide, eps=1e-3),
                nn.Hardswish(),
            ),
            SqueezeExcite(wide),
            nn.Sequential(nn.Conv2d(wide, channels, 1, bias=False), nn.BatchNorm2d(channels, eps=1e-3)),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.block(x)


@architecture("MobileNetV3")
def mobilenet_v3() -> Setup:
    model = nn.Sequential()
    model.add_module(
        "features",
        nn.Sequential(
            nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1, bias=False), nn.BatchNorm2d(8), nn.Hardswish()),
            InvertedResidual(8, 24, 3),
            InvertedResidual(8, 32, 5),
            nn.Sequential(nn.Conv2d(8, 48, 1, bias=False), nn.BatchNorm2d(48), nn.Hardswish()),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
        ),
    )
    model.add_module(
        "classifier", nn.Sequential(nn.Linear(48, 64), nn.Hardswish(), nn.Dropout(0.2), nn.Linear(64, CLASSES))
    )
    return classifier(model, torch.optim.AdamW(model.parameters(), lr=3e-3), "classifier.3")


class EncoderBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.self_attention = nn.MultiheadAttention(width, 4, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        y = self.ln_1(x)
        x = x + self.self_attention(y, y, y, need_weights=False)[0]
        return x + self.mlp(self.ln_2(x))


class VisionTransformer(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.conv_proj = nn.Conv2d(3, width, 4, 4)
        self.class_token = nn.Parameter(torch.zeros(1, 1, width))
        self.pos_embedding = nn.Parameter(torch.randn(1, 17, width) * 0.02)
        self.encoder = nn.Sequential(*(EncoderBlock(width) for _ in range(2)), nn.LayerNorm(width))
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv_proj(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.class_token.expand(len(x), -1, -1), x], dim=1) + self.pos_embedding
        return self.head(self.encoder(x)[:, 0])


@architecture("ViT")
def vit() -> Setup:
    model = VisionTransformer()
    return classifier(model, torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.05), "head", clip=1.0)


class WindowAttention(nn.Module):
    """As torchvision writes it: the weights of `qkv` and `proj` are used by F.linear, not by calling the modules."""

    def __init__(self, width: int, window: int = 2, heads: int = 2) -> None:
        super().__init__()
        self.window, self.heads = window, heads
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.relative_position_bias_table = nn.Parameter(torch.zeros((2 * window - 1) ** 2, heads))
        grid = torch.stack(torch.meshgrid(torch.arange(window), torch.arange(window), indexing="ij")).flatten(1)
        apart = (grid[:, :, None] - grid[:, None, :]).permute(1, 2, 0) + window - 1
        self.register_buffer("relative_position_index", (apart[..., 0] * (2 * window - 1) + apart[..., 1]).flatten())

    def forward(self, x: Tensor) -> Tensor:
        batch, height, width, channels = x.shape
        w, tokens = self.window, self.window**2
        x = (
            x.view(batch, height // w, w, width // w, w, channels)
            .permute(0, 1, 3, 2, 4, 5)
            .reshape(-1, tokens, channels)
        )
        qkv = F.linear(x, self.qkv.weight, self.qkv.bias).reshape(len(x), tokens, 3, self.heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        index = self.relative_position_index
        assert isinstance(index, Tensor)
        bias = self.relative_position_bias_table[index].view(tokens, tokens, -1).permute(2, 0, 1)
        attention = (q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5 + bias).softmax(-1)
        x = (attention @ v).transpose(1, 2).reshape(len(x), tokens, channels)
        x = F.linear(x, self.proj.weight, self.proj.bias)
        x = x.view(batch, height // w, width // w, w, w, channels).permute(0, 1, 3, 2, 4, 5)
        return x.reshape(batch, height, width, channels)


class SwinBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.attn, self.norm2 = nn.LayerNorm(width), WindowAttention(width), nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Swin(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.embed = nn.Conv2d(3, width, 2, 2)
        self.first = SwinBlock(width)
        self.merge_norm, self.merge = nn.LayerNorm(4 * width), nn.Linear(4 * width, 2 * width, bias=False)
        self.second = SwinBlock(2 * width)
        self.norm, self.head = nn.LayerNorm(2 * width), nn.Linear(2 * width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(self.embed(x).permute(0, 2, 3, 1))
        x = torch.cat([x[:, 0::2, 0::2], x[:, 1::2, 0::2], x[:, 0::2, 1::2], x[:, 1::2, 1::2]], -1)
        x = self.second(self.merge(self.merge_norm(x)))
        return self.head(self.norm(x).mean(dim=(1, 2)))


@architecture("Swin")
def swin() -> Setup:
    model = Swin()
    return classifier(model, torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.05), "head")


class LayerNorm2d(nn.LayerNorm):
    """Over the channels of an image."""

    def forward(self, input: Tensor) -> Tensor:
        input = input.permute(0, 2, 3, 1)
        input = F.layer_norm(input, self.normalized_shape, self.weight, self.bias, self.eps)
        return input.permute(0, 3, 1, 2)


class ConvNextBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.dwconv, self.norm = nn.Conv2d(width, width, 7, padding=3, groups=width), LayerNorm2d(width, eps=1e-6)
        self.pwconv1, self.pwconv2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.gamma = nn.Parameter(1e-2 * torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.dwconv(x)).permute(0, 2, 3, 1)
        y = self.gamma * self.pwconv2(F.gelu(self.pwconv1(y)))
        return x + y.permute(0, 3, 1, 2)


class ConvNext(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, width, 4, 4), LayerNorm2d(width, eps=1e-6))
        self.blocks = nn.Sequential(*(ConvNextBlock(width) for _ in range(2)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.stem(x)).mean((-2, -1))))


@architecture("ConvNeXt")
def convnext() -> Setup:
    model = ConvNext()
    return classifier(model, torch.optim.AdamW(model.parameters(), lr=1e-3), "head")


def double_conv(inside: int, outside: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inside, outside, 3, padding=1),
        nn.BatchNorm2d(outside),
        nn.ReLU(inplace=True),
        nn.Conv2d(outside, outside, 3, padding=1),
        nn.BatchNorm2d(outside),
        nn.ReLU(inplace=True),
    )


class UNet(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.inc, self.down = double_conv(3, width), double_conv(width, 2 * width)
        self.up = nn.ConvTranspose2d(2 * width, width, 2, 2)
        self.conv, self.outc = double_conv(2 * width, width), nn.Conv2d(width, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        first = self.inc(x)
        second = self.up(self.down(F.max_pool2d(first, 2)))
        return self.outc(self.conv(torch.cat([first, second], dim=1)))


@architecture("U-Net")
def unet() -> Setup:
    model = UNet()
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3, momentum=0.9)
    images, masks = torch.randn(EXAMPLES, 3, 16, 16), torch.randint(2, (EXAMPLES, 16, 16))
    return Setup(
        model,
        optimizer,
        EXAMPLES,
        supervised(model, optimizer, lambda ids: F.cross_entropy(model(images[ids]), masks[ids])),
        torch.randn(1, 3, 16, 16),
        lambda output: output[:, 1].sum(dim=(1, 2)),
        "outc",
        batch_size=4,
    )
