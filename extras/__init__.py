"""Features that most runs do not use. Each is one file or folder here, and everything else works without it.

To remove one, delete extras/NAME (or extras/NAME.py) and tests/extras/NAME. The program imports an extra only where a
setting asks for it, never at the top of a file. An extra may import the program. It may import another extra only if
its first file says so: NEEDS = ("other",).
"""
