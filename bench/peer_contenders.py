# SPDX-License-Identifier: Apache-2.0
"""Who is compared in peers.py, and with which options."""

import dataclasses

# The tables: what is computed, and how many products of 2 BT V H the result needs, however many a
# contender computes.
SECTIONS = {
    "step": "Loss and both gradients",
    "forward": "Forward and loss",
    "gradient": "Both gradients, logits recomputed",
}
PRODUCTS = {"step": 3, "forward": 1, "gradient": 3}

CCE_LABEL = "CCE's torch_compile fallback (holds the logits; its Triton kernel needs a GPU)"


@dataclasses.dataclass
class Contender:
    key: str  # unique, on the command line and in the JSON
    label: str
    ops: dict  # section -> what the worker calls it
    kind: str = ""  # of peer_torch.py's CONTENDERS; empty: ours
    logit_bytes: float = 0  # it is known to hold per element of [BT, V]: a guess before it runs
    options: dict = dataclasses.field(default_factory=dict)
    tunings: list = dataclasses.field(default_factory=list)  # options to choose from
    python: str = ""

    @property
    def ours(self):
        return not self.kind


def linear_cross_entropy_tunings():
    found = [{"acc_policy": "auto"}]
    for acc_dtype in ("bfloat16", "float32"):
        for chunk in (128, 256, 512, 1024):
            found.append(
                {"acc_policy": "accurate", "acc_dtype": acc_dtype, "batch_chunk_size": chunk}
            )
    return found


def is_default(options):
    """Of linear_cross_entropy."""
    return options == {"acc_policy": "auto"}


def options_text(options):
    if is_default(options):
        return "default options"
    return ", ".join(f"{key}={value}" for key, value in options.items())


def contenders_of(pythons):
    """Ours, to the first of which times are related, then what each Python offers.

    pythons: {path: version of its torch}."""
    found = [
        Contender("logitless", "Logitless", {section: section for section in SECTIONS}),
        Contender("logitless-recompute", "Logitless, recomputing", {"step": "step-recompute"}),
        Contender("logitless-sparse", "Logitless, grad_tolerance 2^-9", {"step": "step-sparse"}),
    ]
    both = {"step": "step", "forward": "forward"}
    bf16, fp32 = {"loss_dtype": "bfloat16"}, {"loss_dtype": "float32"}
    for python, version in pythons.items():
        theirs = [
            Contender("eager-bf16", "eager, bf16 loss", both, "eager", 8, bf16),
            Contender("eager-fp32", "eager, fp32 loss", both, "eager", 18, fp32),
            Contender("compile-bf16", "torch.compile, bf16 loss", both, "compile", 6, bf16),
            Contender("compile-fp32", "torch.compile, fp32 loss", both, "compile", 10, fp32),
            Contender(
                "linear_cross_entropy",
                "linear_cross_entropy, best options",
                {"step": "step"},
                "linear_cross_entropy",
                2,
                tunings=linear_cross_entropy_tunings(),
            ),
            Contender("cce", CCE_LABEL, {"step": "step"}, "cce", 10),
            Contender("logitless.torch", "logitless.torch", both, "logitless"),
            Contender(
                "mm",
                "bare products, mm(out=)",
                {"step": "products", "forward": "product", "gradient": "products"},
                "bare",
                2,
            ),
        ]
        for contender in theirs:
            contender.python = python
            contender.label = f"PyTorch {version}: {contender.label}"
            if len(pythons) > 1:
                contender.key += f"@{version}"
        found += theirs
    return found
