"""What the command prints with: rich on a terminal where it is installed, else plain text; colours, widths, progress."""

from __future__ import annotations

import importlib.util
import io
import os
import pty
import re
import subprocess
import sys
import threading
from collections.abc import Callable

import pytest

from attention_ext.command import output
from attention_ext.command.output import Progress, Table

needs_rich = pytest.mark.skipif(importlib.util.find_spec("rich") is None, reason="rich is not installed")
HIDE = "import sys; sys.modules['rich'] = None\n"
MAIN = "import sys; from attention_ext.__main__ import main; sys.exit(main(sys.argv[1:]))"
BENCH = ("bench", "--shape", "1,4,2,16,16,8,4", "--device", "cpu", "--repeat", "2")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rich", None)


@pytest.fixture(params=["plain", pytest.param("rich", marks=needs_rich)])
def to_terminal(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], object]], str]:
    """What a function prints to stdout and stderr where both are a terminal of 80 columns, with and without rich."""

    def printed(function: Callable[[], object]) -> str:
        screen = Terminal()
        with monkeypatch.context() as patch:
            if request.param == "plain":
                patch.setitem(sys.modules, "rich", None)
            for name, text in (("COLUMNS", "80"), ("TERM", "xterm-256color"), ("NO_COLOR", "1")):
                patch.setenv(name, text)
            patch.setattr(sys, "stdout", screen)
            patch.setattr(sys, "stderr", screen)
            function()
        return screen.getvalue()

    return printed


def table() -> Table:
    made = Table("", "ms", "ratio", "")
    made.add("ours", "1.5", "2.00", "a kernel", style="good")
    made.add("theirs [x]", "-", "-", "a reason that goes on and on " * 4 + "until it ends")
    return made


def test_a_table(to_terminal: Callable[..., str]) -> None:
    """All of it is there, within the screen; what looks like markup is text."""
    lines = to_terminal(table().print).splitlines()
    assert max(map(len, lines)) <= 80 and len(lines) >= 5
    words = " ".join(" ".join(lines).split())
    assert "ours 1.5 2.00 a kernel" in words and "theirs [x] - - a reason" in words and words.endswith("until it ends")


def test_a_table_wider_than_the_screen(to_terminal: Callable[..., str]) -> None:
    """No digit of it is lost."""
    made = Table("call", "error", "share")
    made.add("x" * 60, "1.23456789e-07 (2.3456789e-08)", "50 %")
    assert f"{'x' * 60}  1.23456789e-07 (2.3456789e-08)   50 %" in to_terminal(made.print)


def test_rows_of_a_table_in_a_pipe(capsys: pytest.CaptureFixture[str]) -> None:
    """One line each, however long."""
    table().print()
    lines = capsys.readouterr().out.splitlines()
    assert (
        [line.split()[0] for line in lines] == ["ms", "ours", "theirs"]
        and lines[2].endswith("until it ends")
        and len(lines[2]) > 120
    )
    assert lines[1] == "ours        1.5   2.00  a kernel" and lines[0] == "             ms  ratio"


def test_paragraphs_and_facts(to_terminal: Callable[..., str]) -> None:
    lines = to_terminal(lambda: (output.say("word " * 40), output.facts({"a": "word " * 30, "longer": "x"}))).splitlines()
    assert max(map(len, lines)) <= 80 and len(lines) >= 6
    assert lines[-1] == "longer  x" and [line[:8] for line in lines[3:-1]] == ["a       ", " " * 8, " " * 8]


def test_progress(to_terminal: Callable[..., str]) -> None:
    def steps() -> None:
        with Progress(3) as progress:
            for name in ("first", "second"):
                progress.step("case", name, 7)

    text = to_terminal(steps)
    assert "case: second" in text and ("2 of 3" in text or "2/3" in text)
    plain = re.sub(r"\x1b\[[\d?]*[a-zA-Z]", "", text)
    assert not plain.split("\r")[-1].strip(), "the line is cleared in the end"


@pytest.mark.parametrize("term", ["xterm", "dumb"])
@pytest.mark.parametrize("tty", [False, True])
def test_progress_is_for_terminals(tty: bool, term: str, monkeypatch: pytest.MonkeyPatch, plain: None) -> None:
    stream = Terminal() if tty else io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv("TERM", term)
    with Progress(1) as progress:
        progress.step("case")
    assert bool(stream.getvalue()) == (tty and term != "dumb")


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_json_has_no_such_number(number: float, capsys: pytest.CaptureFixture[str]) -> None:
    output.say_json({"a": [1.5, number], "b": {"c": number}})
    assert capsys.readouterr().out.replace("\n", "").replace(" ", "") == '{"a":[1.5,null],"b":{"c":null}}'


def in_a_terminal(*args: str, hide: bool = False, piped_errors: bool = False, **environment: str) -> tuple[str, str]:
    """What the command prints to a terminal of 80 columns, and what to stderr if that is a pipe."""
    env = {name: text for name, text in os.environ.items() if name not in ("NO_COLOR", "COLUMNS", "FORCE_COLOR")}
    env |= {"TERM": "xterm-256color", "COLUMNS": "80", "OMP_NUM_THREADS": "1"} | environment
    ours, theirs = pty.openpty()
    read: list[bytes] = []

    def reader() -> None:
        while True:
            try:
                read.append(os.read(ours, 1 << 16))
            except OSError:
                return

    thread = threading.Thread(target=reader)
    thread.start()
    errors = subprocess.PIPE if piped_errors else theirs
    command = [sys.executable, "-c", HIDE * hide + MAIN, *args]
    done = subprocess.run(command, stdin=theirs, stdout=theirs, stderr=errors, env=env, timeout=120, check=False)
    os.close(theirs)
    thread.join()
    os.close(ours)
    text = b"".join(read).decode()
    assert done.returncode == 0, text
    return text, (done.stderr or b"").decode()


COLOUR = re.compile(r"\x1b\[[\d;]*m")


@pytest.mark.parametrize("hide", [False, pytest.param(True, marks=needs_rich)])
def test_a_dumb_terminal(hide: bool) -> None:
    text, _ = in_a_terminal(*BENCH, hide=hide, TERM="dumb")
    assert "\x1b" not in text and re.search(r"^three calls +\d", text, re.MULTILINE)


def test_a_terminal_without_rich() -> None:
    text, _ = in_a_terminal(*BENCH, hide=True)
    assert "\x1b" not in text and "1,4,2,16,16,8,4: three calls: 20 of 20" in text
    shown = [line.rpartition("\r")[2] for line in text.replace("\r\n", "\n").splitlines()]
    assert max(map(len, shown)) <= 80


@needs_rich
def test_a_terminal_with_rich() -> None:
    """A bar on stderr alone; no colour with NO_COLOR; a table within the screen."""
    text, errors = in_a_terminal(*BENCH, piped_errors=True)
    assert not errors and "20/20" not in text
    assert max(map(len, text.splitlines())) <= 80 and re.search(r"^three calls +\d", text, re.MULTILINE) and "────" in text
    both, _ = in_a_terminal(*BENCH)
    assert "20/20" in both and COLOUR.search(both)
    without, _ = in_a_terminal(*BENCH, NO_COLOR="1")
    assert "20/20" in without and not COLOUR.search(without)


@needs_rich
def test_json_on_a_terminal_has_no_colour() -> None:
    text, errors = in_a_terminal(*BENCH, "--json", piped_errors=True)
    assert text.startswith("{") and "\x1b" not in text and not errors
