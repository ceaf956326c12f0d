"""Bad input, found before any actor starts: without torch and Ray where that can be, and named in one line."""
