"""Networks of the size that people train, on random data of the usual shapes."""

from __future__ import annotations

import torch

from zoo import Setup, full_size
from zoo.hugging_face import language_model as hugging_face_model
from zoo.text import NanoGPT, language_model
from zoo.vision import ResNet18, classifier


@full_size("ResNet-18, 224 × 224, batch of 8")
def resnet18() -> Setup:
    model = ResNet18(width=64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
    return classifier(model, optimizer, "fc", size=224)


@full_size("nanoGPT for characters, 256 tokens, batch of 8")
def character_gpt() -> Setup:
    model = NanoGPT(tokens=65, width=384, layers=6, heads=6, length=256)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.99), weight_decay=0.1)
    return language_model(model, optimizer, "lm_head", tokens=65, length=256)


@full_size("Hugging Face GPT-2 small, 64 tokens, batch of 2")
def gpt2_small() -> Setup:
    from transformers import GPT2Config, GPT2LMHeadModel

    setup = hugging_face_model(GPT2LMHeadModel(GPT2Config()), lr=1e-4, tokens=50_257, length=64)
    setup.batch_size = 2
    return setup
