# specctl in a container. NOT BUILT YET by its authors.
# The default build of PyTorch, which brings its CUDA libraries; the host has the driver and the NVIDIA
# container toolkit.
#   docker build -f containers/cuda.Dockerfile -t specctl:cuda .
FROM python:3.11-slim

ENV PYTHONUNBUFFERED=1 PIP_DISABLE_PIP_VERSION_CHECK=1 HF_HOME=/cache/huggingface XDG_CACHE_HOME=/cache
WORKDIR /opt/specctl

# The compiler is for Triton's kernels, and for the decoding step where a model is on the CPU.
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*

# What changes rarely comes first: the pinned dependencies, each checked by its sha256.
COPY locks locks
COPY constraints.txt ./
RUN pip install --no-cache-dir --require-hashes --no-deps -r locks/run.lock
RUN pip install --no-cache-dir -r locks/torch.lock --require-hashes --no-deps \
    && pip install --no-cache-dir -c constraints.txt "torch==2.13.0"

COPY . .
RUN pip install --no-cache-dir -c constraints.txt ".[plots,data,serve,grammar]"

RUN useradd --uid 1000 --create-home specctl \
    && mkdir -p /srv/runs /cache && chown -R specctl /srv /cache
USER specctl
WORKDIR /srv
EXPOSE 8000
ENTRYPOINT ["specctl"]
CMD ["--help"]
