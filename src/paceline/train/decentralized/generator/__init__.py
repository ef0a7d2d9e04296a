"""The group generator as a network service, and the workers' client. Nothing here needs torch.

``messages.py`` has what is said, ``wire.py`` how bytes are framed and authenticated. The service's side: ``job.py``
decides what a message does (no network, no clock), ``numbers.py`` knows who is who, ``averages.py`` has the averages of
all workers, ``service.py`` the sockets. The worker's side: ``client.py``, with ``search.py`` to find a service and
``connecting.py`` for the socket. ``secret.py`` reads the file with the job's secret.
"""

from __future__ import annotations

from paceline.train.decentralized.generator.client import GeneratorClient
from paceline.train.decentralized.generator.service import GeneratorService

__all__ = ["GeneratorClient", "GeneratorService"]
