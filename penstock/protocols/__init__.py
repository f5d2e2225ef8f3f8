"""The sockets: protocols translate between clients and Servables and know nothing else."""
