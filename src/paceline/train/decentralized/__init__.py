"""``paceline.Decentralized``: training by workers of mixed speed, which average their weights now and then.

``wrapper.py`` is what users see; ``weights.py`` has a model's weights as one vector; ``mesh.py`` adds vectors up among
some workers; ``schemes/`` says who averages what, and when; ``generator/`` is the service that forms groups.
"""
