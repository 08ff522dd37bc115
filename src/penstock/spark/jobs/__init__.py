"""The jobs of the pipeline: each a plain function over a SparkSession, and a `penstock spark …` command."""
