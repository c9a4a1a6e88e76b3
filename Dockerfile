# The image for the machines of a Ray cluster, and for single runs:
#   docker build -t reshard .
#   docker run --rm --shm-size 1g -v /checkpoints:/checkpoints reshard \
#       python -m pipeline.reshard /checkpoints/SOURCE /checkpoints/TARGET --mp 1 --dp 1 --layout unflat --state drop
#   docker run --network host --shm-size 1g reshard ray start --address HEAD:6379 --block
FROM python:3.11-slim

# For an index with smaller wheels of torch: --build-arg PIP_ARGS="--extra-index-url https://download.pytorch.org/whl/cpu"
ARG PIP_ARGS=""
# The code is on the path of every process, so workers find it whatever started them.
ENV PYTHONPATH=/app PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 RAY_USAGE_STATS_ENABLED=0
WORKDIR /app

COPY requirements.txt ./
RUN pip install --no-cache-dir ${PIP_ARGS} -r requirements.txt
COPY cluster ./cluster
COPY tasks ./tasks
COPY pipeline ./pipeline

CMD ["python", "-m", "pipeline.reshard", "--help"]
