"""Resolution: a program against the files of its module gives probepoints."""
