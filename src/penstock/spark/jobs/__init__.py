"""The jobs of the Spark pipeline: each is a function that takes a SparkSession, and a command `penstock spark …`."""
