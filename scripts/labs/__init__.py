"""What runs inside the network labs of scripts/netlab.py, as processes of their own."""
