"""Life and death of the processes, by Ray; the only folder that imports it. No token passes here."""

from nori_cluster.env import prepare_ray

prepare_ray()
