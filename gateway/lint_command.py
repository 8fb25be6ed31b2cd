"""`radixgate lint PROMPT`: what in a prompt keeps its prefix from being found again.

PROMPT is a file, or `-`: the body of a chat completion as JSON, or the text of a system prompt.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import cast

from engine.errors import RequestError
from gateway.chat_request import parse_chat_request
from retrieval.documents import render
from retrieval.lint import Finding, lint

EXIT_FOUND = 1
_SHOWN = 60


def add_lint_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:  # pyright: ignore[reportPrivateUsage]
    parser = commands.add_parser("lint", help="show what in a prompt will break its prefix in the cache")
    parser.add_argument("prompt", metavar="PROMPT", help="a file, or -: a chat completion's JSON, or a system prompt")
    parser.add_argument("--json", action="store_true", help="a JSON list of the findings")
    parser.set_defaults(command=run_lint)


def run_lint(arguments: argparse.Namespace) -> int:
    """Exit code 1 when there is something to say."""
    path = cast("str", arguments.prompt)
    text = sys.stdin.read() if path == "-" else Path(path).read_text("utf-8")
    names, parts = prompt_parts(text)
    findings = lint(parts)
    if arguments.json:
        print(json.dumps([{"where": names[each.part], **asdict(each)} for each in findings]))
    else:
        for each in findings:
            print(_line(names[each.part], each))
        print(f"{len(findings)} found" if findings else "nothing here will break a prefix")
    return EXIT_FOUND if findings else 0


def prompt_parts(text: str) -> tuple[list[str], list[str]]:
    """Names and texts of the prompt's parts, in the prompt's order."""
    if not text.lstrip().startswith("{"):
        return ["system", "question"], [text, ""]
    try:
        request = parse_chat_request(text.encode(), "application/json", max_choices=1 << 30)
    except RequestError as error:
        raise SystemExit(f"this is no chat completion: {error.message}") from error
    leading = [i for i, message in enumerate(request.messages) if message.role == "system"]
    rest = [i for i in range(len(request.messages)) if i not in leading]
    names = [f"messages[{i}]" for i in leading]
    parts = [request.messages[i].text for i in leading]
    names += [f"documents[{i}]" for i in range(len(request.documents))]
    parts += [render(document) for document in request.documents]
    return [*names, *(f"messages[{i}]" for i in rest)], [*parts, *(request.messages[i].text for i in rest)]


def _line(where: str, finding: Finding) -> str:
    shown = finding.text if len(finding.text) <= _SHOWN else f"{finding.text[:_SHOWN]}…"
    return (
        f"{where}, character {finding.start}: {finding.kind}: {shown!r}; "
        f"the {finding.num_behind} characters behind it are computed anew whenever it changes"
    )
