"""The commands of a coding agent: `context`, `try`, `best`, `ledger`, and the skill that teaches it these."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from autokernel_hf._console import guarded
from autokernel_hf._options import Debug, Json, RunOption, TargetOption
from autokernel_hf.errors import UsageError


def context(run: RunOption, target: TargetOption = None, json: Json = False, debug: Debug = False) -> None:
    """What a coding agent needs to know before its next attempt."""
    with guarded("context", json, debug) as console:
        from autokernel_hf import agent_verbs

        console.result(agent_verbs.context(run, target), agent_verbs.context_text)


def try_(
    file: Annotated[Path, typer.Argument(help="The candidate: a .cpp, .cu or .py file.")],
    note: Annotated[str, typer.Option(help="The hypothesis: what changed, and why it should be faster.")],
    run: RunOption,
    target: TargetOption = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Judge an attempt, keep or revert it, and record it; exit code 0 whatever the verdict."""
    with guarded("try", json, debug) as console:
        from autokernel_hf import agent_verbs

        console.stage(f"Judging {file}")
        console.result(agent_verbs.attempt(run, target, file, note, console), agent_verbs.attempt_text)


def best(run: RunOption, target: TargetOption = None, json: Json = False, debug: Debug = False) -> None:
    """The best candidate of a target so far."""
    with guarded("best", json, debug) as console:
        from autokernel_hf import agent_verbs

        document = agent_verbs.best(run, target)
        console.result(document, lambda c, d: c.raw(str(d["source"])))


def ledger(run: RunOption, target: TargetOption = None, json: Json = False, debug: Debug = False) -> None:
    """All experiments of a run."""
    with guarded("ledger", json, debug) as console:
        from autokernel_hf import agent_verbs

        console.result(agent_verbs.ledger(run, target), agent_verbs.ledger_text)


def skill_add(
    claude: Annotated[bool, typer.Option("--claude", help="For Claude Code: ~/.claude/skills.")] = False,
    codex: Annotated[bool, typer.Option("--codex", help="For Codex: ~/.codex/skills.")] = False,
    dest: Annotated[Path | None, typer.Option(help="Another folder of skills.")] = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Install the agent skill."""
    with guarded("skill add", json, debug) as console:
        from autokernel_hf.skill import add_skill

        chosen = [Path.home() / ".claude/skills"] * claude + [Path.home() / ".codex/skills"] * codex
        chosen += [dest] if dest else []
        if len(chosen) != 1:
            raise UsageError("Name one place.", remedy="Use --claude, --codex or --dest DIR.")
        path = add_skill(chosen[0])
        console.result({"path": str(path)}, lambda c, d: c.line(d["path"]))
