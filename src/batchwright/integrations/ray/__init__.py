"""Many machines by Ray: one pool of calls, rows encoded on all nodes, training, gym clients."""

from batchwright.integrations.ray.cluster import join
from batchwright.integrations.ray.pool import RayPool
from batchwright.integrations.ray.workers import RayWorkers

__all__ = ["RayPool", "RayWorkers", "join"]
