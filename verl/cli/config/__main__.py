"""python -m verl.cli.config: the table of all keys."""

import sys

from verl.cli.config.explain import main

sys.exit(main())
