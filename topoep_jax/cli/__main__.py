"""`python -m topoep_jax.cli` is `topoep`."""

import sys

from topoep_jax.cli import main

sys.exit(main())
