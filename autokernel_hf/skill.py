"""The agent skill: what a coding agent needs to know, where its program looks for it."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

NAME = "autokernel-hf"


def add_skill(folder: Path) -> Path:
    """Write the skill below a folder of skills; an older one of ours is replaced. Returns its SKILL.md."""
    path = folder.expanduser() / NAME / "SKILL.md"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(skill_text(), encoding="utf-8")
    return path


def skill_text() -> str:
    """The skill: front matter, then the contract that `program.md` holds."""
    contract = resources.files("autokernel_hf").joinpath("program.md").read_text(encoding="utf-8")
    front = (
        "---\n"
        f"name: {NAME}\n"
        "description: Optimize one GPU or CPU kernel of a Hugging Face model with autokernel-hf: read the context, edit the "
        "one kernel file, try it, and let the judge keep or revert it. Use when asked to speed up a kernel in a run folder.\n"
        "---\n\n"
    )
    return front + contract
