"""DATA.CACHE: decoded images in one file that is mapped into memory."""
