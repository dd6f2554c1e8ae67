"""Is what a build needs on this machine? Prints what is missing and how to get it, and exits with 1 then.

The Makefile runs this before it makes an environment. It is plain for an old Python 3 to run it and be told its age.
"""

import os
import shutil
import sys
import sysconfig

OLDEST = (3, 11)
COMPILERS = ("c++", "g++", "clang++")


def missing(version=sys.version_info, which=shutil.which, environ=os.environ):
    """What is missing, a sentence each; nothing when all is there."""
    if tuple(version[:2]) < OLDEST:
        return [
            f"wavefill needs Python {OLDEST[0]}.{OLDEST[1]} or newer; this is {version[0]}.{version[1]}. "
            "Name one: make PYTHON=python3.12 ..."
        ]
    found = []
    if not _has_module("venv") or not _has_module("ensurepip"):
        found.append("Python's venv module is missing. Debian, Ubuntu: apt-get install python3-venv")
    named = environ.get("CXX")
    if named and which(named.split()[0]) is None:
        found.append(f"CXX names {named}, which is not on the path. Correct or unset it.")
    if not named and not any(which(name) for name in COMPILERS):
        found.append(
            f"A C++ compiler is needed and none of {', '.join(COMPILERS)} is on the path. Debian, Ubuntu: "
            "apt-get install g++; Fedora: dnf install gcc-c++; macOS: xcode-select --install"
        )
    if not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")):
        found.append("Python's C headers are missing. Debian, Ubuntu: apt-get install python3-dev; "
                     "Fedora: dnf install python3-devel")
    return found


def _has_module(name):
    try:
        __import__(name)
    except ImportError:
        return False
    return True


if __name__ == "__main__":
    sentences = missing()
    for sentence in sentences:
        sys.stderr.write("error: " + sentence + "\n")
    sys.exit(1 if sentences else 0)
