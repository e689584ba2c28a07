# CPU image: tests, data preparation and small runs.
#   docker build -f launch/cpu.Dockerfile -t nsa-m7c:cpu .
#   docker run --rm --shm-size 1g -v "$PWD/runs:/nsa-m7c/runs" nsa-m7c:cpu --num_gpus 2 recipes/m7c.py
FROM python:3.11-slim-bookworm
# torch.compile and Triton compile C++ at run time; DeepSpeed's launcher reads git and ps.
RUN apt-get update && apt-get install -y --no-install-recommends g++ git procps && \
    rm -rf /var/lib/apt/lists/*
WORKDIR /nsa-m7c
COPY launch/constraints.txt launch/constraints.txt
RUN pip install --no-cache-dir -c launch/constraints.txt torch --index-url https://download.pytorch.org/whl/cpu
COPY pyproject.toml README.md LICENSE ./
COPY nsa nsa
COPY recipes recipes
COPY ds_configs ds_configs
RUN pip install --no-cache-dir -c launch/constraints.txt -e '.'
ENTRYPOINT ["deepspeed"]
