# SPDX-License-Identifier: Apache-2.0
"""What the documentation shows runs."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_readme_s_ten_lines_run(script):
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert len(blocks) == 1
    assert len([line for line in blocks[0].splitlines() if line.strip()]) <= 10
    printed = script(blocks[0])
    assert re.fullmatch(r"\d+\.\d\d torch\.Size\(\[50000, 64\]\)\n", printed)


def test_every_name_in_the_python_page_exists():
    import logitless
    import logitless.hf
    import logitless.numpy
    import logitless.torch_npu

    text = (ROOT / "docs/python.md").read_text()
    for path in sorted(set(re.findall(r"logitless(?:\.\w+)+(?=[(`])", text))):
        value = logitless
        for name in path.split(".")[1:]:
            value = getattr(value, name)
