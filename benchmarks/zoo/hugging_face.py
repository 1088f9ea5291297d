"""Tiny networks of Hugging Face's transformers and peft, made from their configurations: nothing is downloaded.

The packages are imported when an architecture is made: without them it is listed as not installed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from zoo import Setup, architecture, supervised

EXAMPLES, LENGTH, TOKENS = 32, 12, 96
SMALL: dict[str, Any] = {"vocab_size": TOKENS, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}


def language_model(
    model: nn.Module, answers: str = "lm_head", *, lr: float = 1e-3, tokens: int = TOKENS, length: int = LENGTH
) -> Setup:
    """Trained with the loss that the model computes from its labels."""
    texts = torch.randint(2, tokens, (EXAMPLES, length))
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=lr)
    return Setup(
        model,
        optimizer,
        EXAMPLES,
        supervised(model, optimizer, lambda ids: model(input_ids=texts[ids], labels=texts[ids]).loss, clip=1.0),
        {"input_ids": texts[:1]},
        lambda output: output.logits[:, -1, int(texts[0, 0])],
        answers,
        batch_size=4,
    )


def gpt2_model() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=TOKENS, n_positions=32, n_embd=32, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=1
    )
    return GPT2LMHeadModel(config)


@architecture("Hugging Face GPT-2")
def gpt2() -> Setup:
    return language_model(gpt2_model())


@architecture("Hugging Face Llama")
def llama() -> Setup:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**SMALL, intermediate_size=64, num_key_value_heads=2, max_position_embeddings=32)
    return language_model(LlamaForCausalLM(config))


@architecture("Hugging Face Mixtral")
def mixtral() -> Setup:
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        **SMALL, intermediate_size=48, num_key_value_heads=2, num_local_experts=4, max_position_embeddings=32
    )
    return language_model(MixtralForCausalLM(config))


@architecture("Hugging Face BERT")
def bert() -> Setup:
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(**SMALL, intermediate_size=64, max_position_embeddings=32, num_labels=3)
    model = BertForSequenceClassification(config)
    texts, labels = torch.randint(2, TOKENS, (EXAMPLES, LENGTH)), torch.randint(3, (EXAMPLES,))
    mask = (torch.arange(LENGTH) < torch.randint(6, LENGTH + 1, (EXAMPLES, 1))).long()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4)

    def loss(ids: Tensor) -> Tensor:
        return model(input_ids=texts[ids], attention_mask=mask[ids], labels=labels[ids]).loss

    return Setup(
        model,
        optimizer,
        EXAMPLES,
        supervised(model, optimizer, loss, clip=1.0),
        {"input_ids": texts[:1], "attention_mask": mask[:1]},
        lambda output: output.logits[:, 1],
        "classifier",
        lambda ids: {"example": ids, "label": labels[ids]},
    )


@architecture("Hugging Face T5")
def t5() -> Setup:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=TOKENS,
        d_model=32,
        d_kv=8,
        d_ff=64,
        num_layers=2,
        num_heads=4,
        decoder_start_token_id=0,
        pad_token_id=0,
    )
    model = T5ForConditionalGeneration(config)
    setup = language_model(model)
    texts = torch.randint(2, TOKENS, (1, LENGTH))
    setup.inputs = {"input_ids": texts, "decoder_input_ids": texts[:, :5]}
    return setup


@architecture("LoRA by peft")
def lora() -> Setup:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True, lora_dropout=0.0)
    return language_model(get_peft_model(gpt2_model(), config), "base_model.model.lm_head", lr=1e-2)  # type: ignore[arg-type]
