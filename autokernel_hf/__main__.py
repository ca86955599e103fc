"""`python -m autokernel_hf` is `autokernel-hf`."""

from autokernel_hf.cli import main

main()
