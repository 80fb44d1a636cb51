#!/usr/local/bin/python3 -I
"""Copy what goes into vLLM's process to a volume that vLLM mounts too.

Usage: /payload/install DESTINATION

Afterwards DESTINATION/python is a directory for PYTHONPATH, with our packages in it and nothing
else. It appears in one step, whole: a copy that was cut short starts over. Standard library only;
needs no shell and writes nowhere else.
"""

import hashlib
import os
import shutil
import sys
from pathlib import Path

SOURCE = Path(__file__).resolve().parent / "python"
TARGET = "python"
DRAFT = ".python.part"
STAMP = ".stamp"
DIRECTORY_MODE = 0o755
FILE_MODE = 0o644


def install(source: Path, destination: Path) -> bool:
    """Copy `source` to `destination/python`, unless the same is there already.

    Args:
        source: Tree with a stamp that names its contents.
        destination: A directory that this user may write to.

    Returns:
        Whether anything was copied.

    Raises:
        OSError: `source` cannot be read, or `destination` cannot be written.
    """
    target, draft = destination / TARGET, destination / DRAFT
    if stamp_of(target) == stamp_of(source) != "":
        return False
    shutil.rmtree(draft, ignore_errors=True)
    shutil.copytree(source, draft, copy_function=copy_file)
    for directory, _, _ in os.walk(draft):
        Path(directory).chmod(DIRECTORY_MODE)
    shutil.rmtree(target, ignore_errors=True)
    draft.rename(target)
    return True


def copy_file(source: str, target: str) -> str:
    """Contents alone: owners and times of an image's files are not the volume's."""
    shutil.copyfile(source, target)
    Path(target).chmod(FILE_MODE)
    return target


def stamp_of(tree: Path) -> str:
    """What names the contents of a tree; empty where there is none."""
    try:
        return (tree / STAMP).read_text(encoding="ascii")
    except OSError:
        return ""


def write_stamp(tree: Path) -> None:
    """Name a tree's contents; done once, when the image is built."""
    digest = hashlib.sha256()
    for path in sorted(tree.rglob("*")):
        if path.is_file() and path.name != STAMP:
            digest.update(f"{path.relative_to(tree)}\0{path.stat().st_size}\0".encode())
            digest.update(path.read_bytes())
    (tree / STAMP).write_text(digest.hexdigest(), encoding="ascii")


def main(arguments: list[str]) -> int:
    """Run the command; its exit code."""
    if len(arguments) != 1:
        sys.stderr.write("usage: /payload/install DESTINATION\n")
        return 2
    if arguments == ["--stamp"]:
        write_stamp(SOURCE)
        return 0
    destination = Path(arguments[0])
    try:
        is_new = install(SOURCE, destination)
    except (OSError, shutil.Error) as error:
        sys.stderr.write(
            f"lmcache-payload: {destination}: {error}; mount a volume there that user {os.getuid()}"
            " may write to\n"
        )
        return 1
    sys.stdout.write(
        f"lmcache-payload: {'copied to' if is_new else 'already in'} {destination / TARGET}\n"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
