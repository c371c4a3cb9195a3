"""Model servers as measured child processes, one model each.

with served(MeasuredGateway(Path("model_repository/fraud")), work) as server:
    server.cold_start_seconds            # process start to READY
    server.first_response(case)          # process start to the first correct answer, seconds
    server.targets[LoadTestProtocol.OIP_GRPC]  # where a load goes
    server.memory_bytes(), server.cpu_seconds()
"""
