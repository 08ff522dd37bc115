"""`python -m simulation.broker --seed N [--steps K]`: run one seed and print each step."""

from simulation.broker.simulation import BrokerSimulation

BrokerSimulation.main()
