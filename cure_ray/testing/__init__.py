"""What authors of engines, attacks and storage back-ends test theirs with: contract suites, tiny networks, made-up results.

    from cure_ray.testing.engines import EngineContract

    class TestMyEngine(EngineContract):
        def make(self, network):
            return MyEngine(network)

`engines`, `attacks` and `storage` hold the contracts and need pytest; `tiny` (networks and images) and `fabricate`, `stores`
(verdicts and whole stores of them) do not. Nothing else of the package imports this room.
"""
