"""What the programs named bench_ share: taking turns, emulated models, links, and ways to average a DDP."""
