"""python -m nori_cluster.gateway --config JSON"""

import sys

from nori_cluster.gateway.main import main

if __name__ == "__main__":
    sys.exit(main())
