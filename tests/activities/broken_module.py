"""A tool module that cannot be imported."""

import json

raise RuntimeError(f"needs a licence {json.dumps(1)}")
