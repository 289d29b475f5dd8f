"""Many machines by Ray: one pool of calls for a cluster, and rows encoded on all its nodes."""

from batchwright.integrations.ray.cluster import join
from batchwright.integrations.ray.pool import RayPool
from batchwright.integrations.ray.workers import RayWorkers

__all__ = ["RayPool", "RayWorkers", "join"]
