"""`make test-gpu`: one command on a machine with a GPU. It checks every path that touches one, byte
by byte, and measures it.

Needs torch with CUDA, Triton and pytest, and the sources on PYTHONPATH; nothing is installed. Each
part is a process with a deadline, so that one that hangs or crashes costs no other. `--dry-run`
does the same on the CPU, with small sizes.
"""
