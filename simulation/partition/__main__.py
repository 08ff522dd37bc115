"""`python -m simulation.partition --seed N [--steps K]`: run one seed and print each step."""

from simulation.partition.simulation import PartitionSimulation

PartitionSimulation.main()
