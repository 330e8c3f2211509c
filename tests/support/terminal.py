"""A terminal, as far as a program that prints lines and progress bars needs one."""

import fcntl
import os
import pty
import re
import select
import struct
import termios

from tests.support.forks import DEADLINE, ROOT, start_fork

TOKEN = re.compile(r"\x1b\[(?P<number>\d*)(?P<command>[A-Za-z])|(?P<character>.)", re.DOTALL)


END = b"\x1b[m"  # a command without effect, which ends what is read


class Screen:
    """The rows of a terminal with endless height. Each character takes one column.

    `shown` has the text of a row at each moment at which the cursor left the row or returned to its beginning: what a
    person saw there, although later text may have replaced it.
    """

    def __init__(self, columns: int):
        self.shown: list[str] = []
        self._columns = columns
        self._rows: list[list[str]] = [[]]
        self._continued: set[int] = set()  # rows that continue the line of the row above them
        self._row = self._column = 0

    def write(self, text: str) -> None:
        for token in TOKEN.finditer(text):
            if token["command"]:
                self._obey(token["command"], int(token["number"] or 0))
            elif token["character"] == "\r":
                self._leave(self._row)
            elif token["character"] == "\n":  # a terminal moves down, and keeps the column
                column = self._column
                self._leave(self._row + 1)
                self._column = column
            else:
                self._put(token["character"])

    def lines(self) -> list[str]:
        """Return the lines that are on the screen now. A line that is wider than the screen has several rows."""
        lines: list[str] = []
        for number, row in enumerate(self._rows):
            if number in self._continued:
                lines[-1] += "".join(row)
            else:
                lines.append("".join(row))
        return [line.rstrip() for line in lines]

    def _obey(self, command: str, number: int) -> None:
        if command == "A":  # up
            column = self._column
            self._leave(max(self._row - max(number, 1), 0))
            self._column = column
        elif command == "K":  # clear the row: 0 from the cursor, 2 all of it
            self._rows[self._row][0 if number == 2 else self._column :] = []
        else:
            assert command == "m", f"the terminal of the tests does not know the command {command}"  # m: colours

    def _leave(self, row: int) -> None:
        """Move the cursor to the beginning of a row."""
        self.shown.append("".join(self._rows[self._row]).rstrip())
        self._row, self._column = row, 0
        while len(self._rows) <= row:
            self._rows.append([])

    def _put(self, character: str) -> None:
        if self._column == self._columns:
            self._leave(self._row + 1)
            self._continued.add(self._row)
        row = self._rows[self._row]
        row += [" "] * (self._column - len(row))
        row[self._column : self._column + 1] = [character]
        self._column += 1


def open_terminal(columns: int) -> tuple[int, int]:
    """Return a new terminal, as the files of the person in front of it and of the program."""
    person, program = pty.openpty()
    fcntl.ioctl(program, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    return person, program


def read_all(person: int, program: int) -> bytes:
    """Return what the program has written, which may arrive in several parts."""
    os.write(program, END)
    written = b""
    while not written.endswith(END):
        written += os.read(person, 2**16)
    return written.removesuffix(END)


def run_on_terminal(script: str, *arguments: str, columns: int = 80, **options) -> tuple[int, Screen]:
    """Run a program on a terminal. Return its exit code and the screen after it. For the options see start_fork."""
    person, program = open_terminal(columns)
    options.setdefault("environment", {"TERM": "xterm"})
    process = start_fork(str(ROOT / script), arguments, [os.ttyname(program)] * 2, **options)
    written = b""
    while process.is_alive():
        if select.select([person], [], [], 0.05)[0]:
            written += os.read(person, 2**16)
    process.join(DEADLINE)
    screen = Screen(columns)
    screen.write((written + read_all(person, program)).decode())
    os.close(person)
    os.close(program)
    return process.exitcode, screen
