"""python -m verl.cli.config: the table of all keys."""

import sys

from verl.cli.config.show import main

sys.exit(main())
