"""`python -m models.checkpoint`: inspects, verifies and converts folders with weights."""

import sys

from models.checkpoint.commands import main

sys.exit(main())
