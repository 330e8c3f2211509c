"""Features that most runs do not use, each in one file or folder. Other packages import an extra only where its setting asks for it."""
